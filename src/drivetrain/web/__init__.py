"""Guards of a web server, beneath serving: whom a request comes from, how much it may ask, how its answer is sent."""
