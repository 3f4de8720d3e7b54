"""The model, the simulation and the load of a forecast."""
