"""What this machine's cores can do right now: multiply-add peak and read bandwidth."""
