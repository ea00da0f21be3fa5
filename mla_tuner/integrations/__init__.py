"""Engines that decode through the tuned plan; each is loaded only where it is asked for."""
