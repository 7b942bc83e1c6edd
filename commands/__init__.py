"""The commands of the command line; the only code that knows all packages."""

__distribution__ = "draftsim"
