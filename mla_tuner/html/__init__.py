"""What a tuner found on a device, as a page to look at: HTML that works offline, or Markdown."""
