"""Inside the process that runs user code."""
