"""Pages of the gateway's HTTP API: a file has a page's view, permission and route."""
