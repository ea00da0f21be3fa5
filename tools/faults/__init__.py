"""The tuning database under fire: processes that die at any moment, and many at once."""
