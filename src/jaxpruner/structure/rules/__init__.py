"""What each primitive says of axes and of removed channels, and how it runs on smaller operands."""
