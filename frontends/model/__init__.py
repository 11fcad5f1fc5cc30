"""Models as they are: names, parameters and what they are spread over, losses, rows of batches."""
