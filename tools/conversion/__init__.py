"""What both converters share; not commands."""
