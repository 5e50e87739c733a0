"""The HTTP server: OpenAI's API over an `EngineClient`. The only home of HTTP libraries; imports no jax."""
