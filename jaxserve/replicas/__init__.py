"""Several engines of one model behind the face of one: data parallelism within a process."""
