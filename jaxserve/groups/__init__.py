"""Requests in flight: what each kind of request makes of the tokens that its sequences get."""
