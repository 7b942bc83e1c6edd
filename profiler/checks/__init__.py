"""Full runs of policies on the device, to hold predictions against."""
