"""Values that users put into `items`."""
