"""Would the tests notice?  Small changes to the core, each run against the tests that reach it."""
