"""Pages of the gateway's HTTP API: a file has a page's view, permission and route.

Each module here with a function `pages(gateway)` adds what it returns; no other file names it.
"""
