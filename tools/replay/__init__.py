"""The replay lab: recorded sweeps and simulated devices drive the real tuner and policy."""
