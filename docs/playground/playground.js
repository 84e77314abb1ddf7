// Loads the scripts of the playground in order. Material's instant navigation would run several <script> elements of a
// page in any order.
"use strict";

(() => {
  const folder = document.currentScript.src;
  for (const name of ["banks.js", "masks.js", "draw.js", "page.js"]) {
    const script = document.createElement("script");
    script.src = new URL(name, folder).href;
    script.async = false;
    document.head.append(script);
  }
})();
