"""Running user code: the warm parent, its children, logs and results."""
