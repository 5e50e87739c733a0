"""The one place that makes parts: a loaded model, or a caller's params, becomes an engine."""
