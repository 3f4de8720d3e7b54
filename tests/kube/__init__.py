"""Kubernetes for tests: an API server that keeps the documented rules, and a kubelet that runs pods as local processes."""
