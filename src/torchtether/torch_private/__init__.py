"""Every private torch name of the house, by subject, each with the reason why no public one does the job."""
