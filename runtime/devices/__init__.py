"""Where ops run: the port that every device fits, and the devices."""
