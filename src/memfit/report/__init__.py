"""Views: nouns in, rich renderables out, one file per view. Pure: nothing here reads, prints or asks the clock.

Every view reads the same in a terminal, without colour, and in a pipe, where it is plain lines made for grep.
"""
