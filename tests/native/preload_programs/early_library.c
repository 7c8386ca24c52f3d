/* Initialises CUDA in its constructor, before any constructor of the preload could have run. */
extern int cuInit(unsigned int flags);
int early_result = -1;

__attribute__((constructor)) static void initialise(void)
{
    early_result = cuInit(0);
}
