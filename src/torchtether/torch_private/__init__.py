"""Every use of torch's private names, by subject, each with the reason why no public name does the job."""
