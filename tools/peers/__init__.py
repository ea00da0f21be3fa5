"""The same decode step in other libraries, to be timed beside ours."""
