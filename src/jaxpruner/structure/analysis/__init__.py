"""What is known of a program: the axes of its values, what removed channels hold, and the groups that follow."""
