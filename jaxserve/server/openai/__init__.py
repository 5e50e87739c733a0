"""OpenAI's endpoints: what bodies mean, and what replies to them look like."""
