"""The engine for callers that await: `AsyncEngine` in a thread, `ProcessEngine` in a process of its own."""
