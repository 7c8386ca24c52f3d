#include "driver.h"

#include "loaded_objects.h"

struct driver driver;

static bool find(void **function, const void *driver_function, const char *name)
{
    *function = loaded_beside(driver_function, name);
    if (*function == NULL) *function = loaded_last(name);
    return *function != NULL;
}

bool driver_find(const void *driver_function)
{
    bool complete = true;
#define DRIVER_LOOKUP(name, parameters) complete = find((void **)&driver.name, driver_function, #name) && complete;
    DRIVER_FUNCTIONS(DRIVER_LOOKUP)
#undef DRIVER_LOOKUP
    return complete;
}
