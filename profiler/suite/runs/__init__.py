"""The suite's runs: pairs recorded, dictated and decoded for real, in turns."""
