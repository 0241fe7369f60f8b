"""The HTTP gateway in front of a job's engines, and the caller that another job asks it with."""
