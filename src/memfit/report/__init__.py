"""Views turn nouns into rich renderables and HTML. They are pure: nothing here reads, prints or asks the clock.

Every view has the same content in a terminal, without colour, and in a pipe, where it is plain lines made for grep.
"""
