"""A team's server: the tables of all its machines in one append-only file, which Datasette serves.

`archive` is the file, `app` and `pages` what is served from it, `client` pulls from and pushes to a
server. What needs datasette is imported by `app` and `pages` alone: pulling and pushing do without.
"""
