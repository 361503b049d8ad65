"""Proofs by which two sides show each other that they know a key, without the key.

`loom.mutual_auth.exchange` is the proof itself: an HMAC over the nonces of both sides. `loom.mutual_auth.over_http`
has either side of a request over HTTP that is proven in both directions, and has a gateway behind a forwarded port
prove itself before the token is shown to it.
"""
