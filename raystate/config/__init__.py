"""A run's settings: the class, its errors, its file, and other libraries' names for them."""
