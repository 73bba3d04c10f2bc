"""What moves data: lanes, their buffers, and how a buffer changes owners."""
