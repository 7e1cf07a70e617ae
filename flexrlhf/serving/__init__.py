"""HTTP servers: their base, with a token and deadlines, and OpenAI's protocol. The standard library alone."""
