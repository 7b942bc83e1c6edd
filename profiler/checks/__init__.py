"""Full runs of policies on the device, with which predictions are compared."""
