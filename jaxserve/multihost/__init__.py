"""One engine over the devices of several processes: the first schedules and tells the others each step."""
