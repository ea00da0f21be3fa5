"""Cross-check: does csrc/ compile and link for arm64 macOS? Runs on Linux, without an Apple SDK."""
