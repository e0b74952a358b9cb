"""What decides and what runs inside a worker: op graph, scheduler, devices, stages, worker."""
