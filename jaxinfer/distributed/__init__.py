"""Prefill and decode workers as processes, on one host or several, and the router in front of them.

`layout` (what runs where), `wire` (messages), `exchange` (KV between processes), `worker` (the process),
`spanning` (a worker that is several processes), `router` (the face of an engine over all of them), `fleet` (workers of
this host, started and stopped).
"""
