"""Starting and ending runners on engines, as many as their queues need."""
