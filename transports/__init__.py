"""How bytes travel: the ZeroMQ control bus and the data paths for tensors."""
