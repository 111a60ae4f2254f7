// What every file needs of Preact, in one place.
export { h, html, render, createContext, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useContext, useErrorBoundary }
  from "../vendor/htm-preact.js";
