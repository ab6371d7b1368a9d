"""The page: a local web server that shows what memfit answers. It computes nothing itself; `cli.page` hands it in."""
