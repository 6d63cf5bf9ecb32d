"""What is silently wrong is found here, before it is sent, and in steps 1, 2, 4, 8, …: see ``ignite_ddl.audit``."""
