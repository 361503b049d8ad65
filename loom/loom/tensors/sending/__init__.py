"""The way of commands to the workers: batches, what repeats in them, and the lines that queued them."""
