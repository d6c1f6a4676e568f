"""A byte-level language model: raystate's example of a real training job."""
