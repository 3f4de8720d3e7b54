"""A file that cannot be loaded, with a dag of evertick."""

raise RuntimeError("the probe's broken file")
