"""Images: padding, resizing, windows and transposed convolutions."""
