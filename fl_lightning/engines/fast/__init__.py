"""Ways of training that only save time: recorded steps, streams of a GPU, stacks of clients."""
